"""Files of tokens and rows of them."""
