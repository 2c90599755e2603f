"""What a look at the nodes of a cluster found."""
