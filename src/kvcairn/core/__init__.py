"""The single-owner core: decides for every request, under one short lock, and does no I/O itself."""
