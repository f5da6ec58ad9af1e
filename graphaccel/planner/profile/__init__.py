"""The profile of a captured step: columns of FLOPs, bytes and seconds."""
