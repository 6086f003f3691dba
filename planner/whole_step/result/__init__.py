"""From the solutions of a search to one plan: the plainest and lightest of equals, with its collectives counted."""
