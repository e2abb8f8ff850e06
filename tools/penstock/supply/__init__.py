"""What Penstock is delivered with: packages of others, and under which licences."""
