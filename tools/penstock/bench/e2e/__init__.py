"""The whole mesh as a user meets it beside other servers: the same weights, the same requests, one client."""
