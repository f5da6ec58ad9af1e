"""A file for each entry of the pipeline: graph text in, graph text out, and values compared."""
