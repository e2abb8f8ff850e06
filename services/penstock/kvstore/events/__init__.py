"""Which blocks came and went: for the router, and for routers of other projects."""
