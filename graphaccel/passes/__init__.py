"""The passes that rewrite the graphs of a step: one pass, one file; `pipeline.py` orders them."""
