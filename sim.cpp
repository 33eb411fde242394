#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <deque>
#include <list>
#include <unordered_map>
#include <algorithm>
#include <string>
#include <set>
using namespace std;
typedef vector<vector<int>> Trace;
int U; Trace T; long LOOK;
void load(const char*n){string f=string("/tmp/p22/")+n+".bin";FILE*fp=fopen(f.c_str(),"rb");int h[2];fread(h,4,2,fp);U=h[1];T.clear();LOOK=0;for(int i=0;i<h[0];i++){int c;fread(&c,4,1,fp);vector<int>v(c);fread(v.data(),4,c,fp);LOOK+=c;T.push_back(v);}fclose(fp);}
double lru(int cap,bool tail){ // intrusive list
  vector<int>nx(U+1),pv(U+1);vector<char>in(U,0);int H=U;nx[H]=pv[H]=H;int n=0;long hits=0;
  auto del=[&](int b){nx[pv[b]]=nx[b];pv[nx[b]]=pv[b];};
  auto add=[&](int b){pv[b]=pv[H];nx[b]=H;nx[pv[H]]=b;pv[H]=b;};
  for(auto&p:T){
    if(!tail){bool w=true;for(int b:p){w=w&&in[b];hits+=w;if(in[b])del(b);else{in[b]=1;n++;}add(b);if(n>cap){int v=nx[H];del(v);in[v]=0;n--;}}}
    else{size_t f=0;while(f<p.size()&&in[p[f]])f++;hits+=f;for(int i=p.size()-1;i>=0;i--){int b=p[i];if(in[b])del(b);else{in[b]=1;n++;}add(b);}while(n>cap){int v=nx[H];del(v);in[v]=0;n--;}}
  }
  return double(hits)/LOOK;}
struct Opt{int clock=1;bool learned=false;double orphan=1;double factor=1.5,low=.3;double ghosts=2;bool behind=true;int shrink=20;double soft=20,power=1.5;int remake=4; double pool_soft=0; bool chainhead=false; double decay=1; double carry=.14; int spare=2; double init=10;double kap=0;int ext=0;double damp=1;bool census=false;int par=0;};
const int C=7,BINS=64;
double START[BINS+1];
static int cls(int u){return u<=1?0:u==2?1:u==3?2:u<=5?3:u<=9?4:u<=20?5:6;}
struct Sim{
  Opt o;int cap,S,area,cnt,freeS;double tickb;
  vector<char>in,orph;vector<double>last;vector<int>uses,par,seg;vector<vector<int>>kids;
  struct Seg{vector<int>b;bool closed=false;};
  vector<Seg>segs;vector<int>closed;
  int open_[2]={-1,-1},room[2]={0,0};long stored=0,copied=0,look=0,req=0;
  double budget=0,most;long bst=0;
  double lost=0;long gone=0;double reached[5]={200,60,30,15,8};double fac[4];
  double H[C][BINS],X[C][BINS],V[C][BINS+1];
  vector<double>gl;vector<int>gu;vector<char>isg;deque<pair<int,double>>gq;long gcount=0;
  long choices=0;
  Sim(int cap,int S,Opt o):o(o),cap(cap),S(S){
    area=cap/S;cnt=cap/area;freeS=cnt;tickb=cap/1024.0;in.assign(U,0);orph.assign(U,0);last.assign(U,0);uses.assign(U,0);par.assign(U,-1);seg.assign(U,-1);kids.resize(U);
    gl.assign(U,0);gu.assign(U,0);isg.assign(U,0);
    most=max(cnt*area/64.0,2.0*area);
    START[0]=0;for(int i=1;i<=BINS;i++)START[i]=pow(2,(i-1)/2.0)*((o.clock==1)?0.5:1);
    memset(H,0,sizeof H);memset(X,0,sizeof X);factors();remake();}
  double now(){return o.clock==0?look:o.clock==1?floor((stored+copied)/tickb):o.clock==2?req: (stored+copied)/tickb;}
  void factors(){double first=(reached[1]+1)/(reached[0]+1);for(int h=0;h<4;h++){double l=(reached[h+1]+1)/(reached[h]+1)/first;fac[h]=max(1.0,min(1+2.0*h,l));}}
  int bin(double a){double s=(o.clock==1)?0.5:1;a/=s;if(a<1)return 0;return min(BINS-1,int(2*log2(a))+1);}
  double lastc=0;vector<int>ids;
  void census(){double t=now(),dt=t-lastc;if(dt<=0)return;lastc=t;for(int b=0;b<U;b++){if(in[b])X[cls(uses[b])][bin(max(0.0,t-last[b]))]+=dt;else if(isg[b])X[cls(gu[b])][bin(max(0.0,t-gl[b]))]+=dt;}}
  void expo(double a,int c){if(o.census)return;int i=0;while(i<BINS-1&&START[i+1]<=a){X[c][i]+=START[i+1]-START[i];i++;}X[c][i]+=a-START[i];}
  void remake(){ if(!o.learned)return;
    double k=o.shrink,ha[BINS];double pb=0;
    for(int i=0;i<BINS;i++){double h=0,x=0;for(int c=0;c<C;c++){h+=H[c][i];x+=X[c][i];}double mid=(START[i]+START[i+1])/2;double base=1/(mid+o.init);double prior=(o.ext>0&&i)?ha[i-1]*base/pb:base;pb=base;ha[i]=(h+k)/(x+k/prior);}
    for(int c=0;c<C;c++){double h[BINS];for(int i=0;i<BINS;i++){double prior=ha[i];if(o.ext>1&&i)prior*=pow(h[i-1]/ha[i-1],o.damp);h[i]=(H[c][i]+k)/(X[c][i]+k/prior);}
      for(int s=0;s<BINS;s++){double sv=1,P=0,Tm=0,best=0;for(int i=s;i<BINS;i++){double d=START[i+1]-START[i],p=1-exp(-h[i]*d);Tm+=sv*(p/h[i]);P+=sv*p;sv*=1-p;if(P/Tm>best)best=P/Tm;if(sv<1e-6)break;}V[c][s]=best;}V[c][BINS]=V[c][BINS-1];}
    if(o.decay<1)for(int c=0;c<C;c++)for(int i=0;i<BINS;i++){H[c][i]*=o.decay;X[c][i]*=o.decay;}
  }
  double val(int b,double t){double a=max(0.0,t-last[b]);double v;
    if(o.learned){int c=cls(uses[b]);double s=(o.clock==1)?0.5:1;double aa=a/s;if(aa<1)v=V[c][0];else{double x=2*log2(aa)+1;int i=int(x);v=i>=BINS-1?V[c][BINS-1]:V[c][i]+(V[c][i+1]-V[c][i])*(x-i);}}
    else{v=fac[min(uses[b]-1,3)]*pow(a+o.soft,-o.power);}
    return orph[b]?v*o.orphan:v;}
  double price(double bl){if(bl<=0||lost==0)return 1e300;return o.factor*lost*(1+o.low/bl);}
  double left(){budget=min(most,budget+(stored-bst)*o.carry);bst=stored;return int(budget);}
  void append(int st,int b){if(!room[st]){if(open_[st]>=0){segs[open_[st]].closed=true;closed.push_back(open_[st]);}
      if(o.learned&&o.census&&st==0)census();open_[st]=segs.size();segs.emplace_back();room[st]=area;freeS--;if(freeS<0){puts("NEG");exit(1);}}
    room[st]--;segs[open_[st]].b.push_back(b);seg[b]=open_[st];}
  void orphans(int b){if(o.orphan>=1)return;vector<int>st;for(int k:kids[b])if(in[k])st.push_back(k);while(!st.empty()){int k=st.back();st.pop_back();if(orph[k]||!in[k])continue;orph[k]=1;for(int x:kids[k])if(in[x])st.push_back(x);}}
  void evict(){double bl=left();double t=now();double pr=price(bl/area);int best=-1;double bv=1e301;choices++;
    for(size_t j=0;j<closed.size();j++){auto&s=segs[closed[j]];double l=0;for(int b:s.b)l+=min(pr,val(b,t));l/=area;if(l<bv){bv=l;best=j;}}
    int v=closed[best];closed.erase(closed.begin()+best);
    vector<int>bs=segs[v].b;vector<pair<double,int>>c;for(size_t i=0;i<bs.size();i++){double w=val(bs[i],t);if(w>pr)c.push_back({-w,(int)i});}
    stable_sort(c.begin(),c.end(),[](auto&a,auto&b){return a.first<b.first;});if((int)c.size()>max(0,(int)bl))c.resize(max(0,(int)bl));
    vector<char>kept(bs.size(),0);for(auto&x:c)kept[x.second]=1;
    double loss=0;int n=0;double had[5]={0};for(size_t i=0;i<bs.size();i++)if(!kept[i]){loss+=val(bs[i],t);n++;had[min(uses[bs[i]]-1,4)]++;}
    loss/=max(1,area-(int)c.size());gone++;lost+=(loss-lost)*max(.05,1.0/gone);
    for(int h=3;h>=0;h--)had[h]+=had[h+1];for(int h=0;h<5;h++)reached[h]=reached[h]*.995+had[h];factors();
    if(gone%o.remake==0)remake();
    budget-=c.size();
    for(size_t i=0;i<bs.size();i++)if(kept[i]){append(1,bs[i]);copied++;}
    vector<int>g;for(size_t i=0;i<bs.size();i++)if(!kept[i]){int b=bs[i];in[b]=0;seg[b]=-1;orph[b]=0;g.push_back(b);
      if(o.learned){isg[b]=1;gl[b]=last[b];gu[b]=uses[b];gq.push_back({b,last[b]});gcount++;
        while(gcount>o.ghosts*cap&&!gq.empty()){auto [x,l]=gq.front();gq.pop_front();if(isg[x]&&gl[x]==l){isg[x]=0;gcount--;expo(now()-l,cls(gu[x]));}}}}
    for(int b:g)orphans(b);
    segs[v].b.clear();segs[v].b.shrink_to_fit();freeS++;}
  int depth=0;
  void openb(int b){double t=now()-o.kap*depth/tickb;if(o.learned){int c=cls(uses[b]);double a=max(0.0,t-last[b]);expo(a,c);H[c][bin(a)]++;}last[b]=t;uses[b]=min(255,uses[b]+1);orph[b]=0;}
  void storeb(int b,int parent){ if(!room[0])while(freeS<=o.spare&&!closed.empty())evict();append(0,b);stored++;in[b]=1;double t=now()-o.kap*depth/tickb;
    if(o.learned&&isg[b]){isg[b]=0;gcount--;int c=cls(gu[b]);double a=t-gl[b];expo(a,c);H[c][bin(a)]++;uses[b]=min(255,gu[b]+1);}else uses[b]=1;
    last[b]=t;orph[b]=0;if(o.par!=0&&par[b]>=0&&parent>=0&&parent!=par[b]&&!isg[b]){auto&kv=kids[par[b]];kv.erase(find(kv.begin(),kv.end(),b));par[b]=-1;}if(par[b]<0&&parent>=0&&parent!=b){par[b]=parent;kids[parent].push_back(b);}}
  double run(double*w){long hits=0;int tl[64];for(int i=0;i<64;i++)tl[i]=-1;long tc=0;for(auto&p:T){req++;size_t f=0;while(f<p.size()&&in[p[f]]){depth=f;openb(p[f]);f++;look++;}hits+=f;for(size_t i=f;i<p.size();i++){int b=p[i];depth=i;if(!in[b]){int pa=i?p[i-1]:-1;if(o.par==1){if(i==f)pa=f?p[f-1]:tl[0];else pa=tl[0];tl[0]=b;}else if(o.par>1){int k=tc++%o.par;pa=tl[k];tl[k]=b;}else if(o.par==-1)pa=-1;storeb(b,pa);}else if(o.behind)openb(b);look++;}}
    *w=double(stored+copied)/stored;return double(hits)/LOOK;}
};
int MB=getenv("MB")?atoi(getenv("MB")):16;
int main(int ac,char**av){
  // sim name shares S variants...
  load(av[1]);vector<double>sh;for(char*p=strtok(av[2],",");p;p=strtok(0,","))sh.push_back(atof(p));int S0=atoi(av[3]);
  for(double s:sh){int cap=int(s*U);int S=min(S0,cap/MB);printf("%-10s %.2f S%-4d lru %.4f tail %.4f",av[1],s,S,lru(cap,false),lru(cap,true));fflush(stdout);
    for(int i=4;i<ac;i++){Opt o;string v=av[i];
      // spec: letters
      char buf[200];strcpy(buf,av[i]);for(char*q=strtok(buf,":");q;q=strtok(0,":")){double x=atof(q+1);switch(q[0]){case 'L':o.learned=true;break;case 'o':o.orphan=x;break;case 'f':o.factor=x;break;case 'w':o.low=x;break;case 'c':o.clock=x;break;case 'g':o.ghosts=x;break;case 'k':o.shrink=x;break;case 'b':o.behind=x;break;case 's':o.soft=x;break;case 'p':o.power=x;break;case 'd':o.decay=x;break;case 'B':o.carry=x;break;case 'I':o.init=x;break;case 'r':o.remake=x;break;case 'S':o.spare=x;break;case 'K':o.kap=x;break;case 'X':o.ext=x;break;case 'Z':o.par=x;break;case 'D':o.damp=x;break;case 'E':o.census=true;break;}}
      Sim m(cap,S,o);double w;double r=m.run(&w);printf(" | %s %.4f w%.2f",av[i],r,w);fflush(stdout);}
    puts("");}
}
