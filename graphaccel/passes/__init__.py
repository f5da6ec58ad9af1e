"""One pass, one file, one public function. `pipeline.py` lists them in order."""
