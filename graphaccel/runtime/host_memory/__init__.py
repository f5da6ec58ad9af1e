"""Host memory of a process: pages that the C library keeps, and large pages."""
