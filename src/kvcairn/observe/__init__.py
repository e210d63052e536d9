"""Shows what a cache does to those who watch it; decides nothing."""
