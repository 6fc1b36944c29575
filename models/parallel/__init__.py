"""One model on several devices: what each rank holds, what ranks send each other, who leads."""
