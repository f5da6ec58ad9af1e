"""Chooses how a captured step runs on a cluster by predicting its memory and time."""
