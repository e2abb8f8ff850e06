"""The clients' only entry: it serves OpenAI's HTTP API and gRPC, and owns a request from first byte to last."""
