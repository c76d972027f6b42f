"""Plan which bytes go from which rank to which engine worker. The plan is computed alike, without IO, in every
process.
"""
