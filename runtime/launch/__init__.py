"""Starting up: where a process stands among its peers, and how they find each other or say who is missing."""
