"""Optional packages: the core never imports them, it looks them up by name where they are asked for."""
