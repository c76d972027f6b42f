"""Send weights from trainer ranks to engine workers: each gets only the slices that it lacks, by a fixed plan."""
