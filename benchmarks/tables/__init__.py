"""Markdown tables of committed measurements, which measured.py puts into the documents."""
