"""What several routers share, and what outlives one."""
