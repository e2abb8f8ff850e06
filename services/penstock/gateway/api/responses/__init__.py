"""OpenAI's Responses: items instead of messages, named events, and a store of what was said."""
