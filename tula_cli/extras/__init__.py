"""Optional packages; the core never imports them but loads them by name on request."""
