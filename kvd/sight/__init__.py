"""What the daemon shows over HTTP: metrics, health, and a page for a browser."""
