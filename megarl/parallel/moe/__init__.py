"""Layers with experts: routing over packs, load balancing, replayed routing."""
