"""`penstock bench large`: what large models are made of, at sizes that fit one machine."""
