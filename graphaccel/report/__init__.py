"""Shows plans; changes nothing."""
