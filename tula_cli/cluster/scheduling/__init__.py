"""What tula needs of a scheduler: the protocol, the table of those that there are, and chains of jobs on any of them."""
