"""Keep the images of a run, and turn them into what models read, by the processor that a model was published with."""
