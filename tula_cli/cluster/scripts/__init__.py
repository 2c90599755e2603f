"""Scripts of the user's own: how they are started, watched, and understood by what their shim has written."""
