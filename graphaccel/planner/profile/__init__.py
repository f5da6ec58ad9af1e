"""A captured step as columns of FLOPs, bytes and seconds."""
