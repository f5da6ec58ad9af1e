"""The one place that touches private names of the libraries below."""
