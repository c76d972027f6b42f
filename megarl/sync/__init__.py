"""Send weights from trainer ranks to engine workers: each worker gets only the slices that it lacks, by a fixed
plan.
"""
