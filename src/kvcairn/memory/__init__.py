"""Memory that blocks lie in: the shared mapping, its slots, and the handles that hold them."""
