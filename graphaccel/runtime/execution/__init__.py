"""Runs one step on this rank: actions, messages, gradient buckets and results over ranks."""
