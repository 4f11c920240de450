# ruff: noqa
import torch
from transformers import MambaConfig, MambaForCausalLM

model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
for step in range(3):
    loss = model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    print(f"step {step} loss {loss.item():.4f}")
print("Training completed.")
