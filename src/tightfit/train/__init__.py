"""The worker's side: whatever imports torch. Only ever spawned, never imported by the desk."""
