"""What prefill and decode workers share: an engine tied to the KV store and to the router.

The engine knows nothing of gRPC; the services know nothing of pages. This package is the joint.
"""
