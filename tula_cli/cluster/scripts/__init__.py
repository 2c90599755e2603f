"""Scripts of users: how they are started, monitored, and evaluated from the files that the shim writes."""
