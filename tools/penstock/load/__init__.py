"""Load: recorded and made-up workloads, played open loop before any server with OpenAI's API, and what came of it."""
