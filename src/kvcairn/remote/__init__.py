"""A client's side of the daemon: the protocol, the arena as another process maps it, and the link."""
