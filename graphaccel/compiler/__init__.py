"""From a model and a batch to programs that run: capture, plan and passes together, and what they
probe."""
