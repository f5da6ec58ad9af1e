"""Run the passes on few identical layers or one of several equal stages, and copy the result."""
