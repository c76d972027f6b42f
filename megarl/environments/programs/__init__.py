"""Programs for Pythons that have a package and not megarl: they import the one, and never the other."""
