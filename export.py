import sys
sys.path.insert(0,'/work/main')
from pathlib import Path
from array import array
from kvfs.bench.traces import load, invent, mix
D=Path('/work/shared/data')
import glob
ts={'conv':load(D/'conversation_trace.jsonl'),'synth':load(D/'synthetic_trace.jsonl.gz'),'agents':load(D/'agent_sessions_trace.jsonl.gz')}
ts['mix']=mix([ts['conv'],ts['synth'],ts['agents']])
for sh in ('chats','agents','rag','mixed'):
    for s in (1,2,3): ts[f'i-{sh}{s}']=invent(sh,s)
for n,t in ts.items():
    ids={}; out=array('i')
    for p in t.prompts:
        out.append(len(p))
        for b in p: out.append(ids.setdefault(b,len(ids)))
    a=array('i',[len(t.prompts),len(ids)]); a.extend(out)
    a.tofile(open(f'/tmp/p22/{n}.bin','wb')); print(n,len(t.prompts),len(ids),sum(map(len,t.prompts)))
