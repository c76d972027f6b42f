"""A folder of import paths: its module stands for a package that is installed apart, in part."""
