"""`penstock scale`: how many workers of which role a mesh should have, and who makes it so."""
