"""The only door: OpenAI's HTTP API and gRPC in front, the mesh behind. It owns a request from first byte to last."""
