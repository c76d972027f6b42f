"""Train layers with experts: routing over packs, load balancing, replayed routing."""
