"""The names by which clients, load tools and other gateways tell which session a request belongs to."""

SESSION_HEADERS = (
    "x-session-affinity",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-smg-routing-key",
    "x-dynamo-session-id",
)
"""The first that a request has names its session."""
