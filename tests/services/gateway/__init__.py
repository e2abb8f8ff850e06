"""Tests of the gateway, on a mesh of fakes that speak real gRPC."""
