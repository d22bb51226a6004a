"""What intervals over launches are worth; scripts/launch_study is its command."""
