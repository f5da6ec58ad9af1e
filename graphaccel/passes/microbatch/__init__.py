"""Passes that split the batch over microbatches and the data axis, and treat the whole-batch head
apart."""
