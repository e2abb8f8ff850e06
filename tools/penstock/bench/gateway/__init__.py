"""The gateway alone, before a mesh that computes nothing: what a token, a refusal and a conversation's turn cost it."""
