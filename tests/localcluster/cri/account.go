package cri

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// account is who a container runs as.
type account struct {
	UID, GID int
	Groups   []int // all of them, sorted
	Home     string
}

// whoRuns settles the container's account from its security context and its image.
func whoRuns(i *image, sc *v1.LinuxContainerSecurityContext) (account, error) {
	spec := i.User
	switch {
	case sc.GetRunAsUser() != nil:
		spec = strconv.FormatInt(sc.RunAsUser.Value, 10)
	case sc.GetRunAsUsername() != "":
		spec = sc.RunAsUsername
	}
	if user, _, ok := strings.Cut(i.User, ":"); ok && user == spec {
		spec = i.User // the kubelet passes the image's own user as runAsUser, without the group
	}
	a, err := lookUp(i.Root, spec)
	if err != nil {
		return a, err
	}
	if g := sc.GetRunAsGroup(); g != nil {
		if sc.GetRunAsUser() == nil && sc.GetRunAsUsername() == "" && i.User == "" {
			return a, errors.New("runAsGroup needs runAsUser")
		}
		a.GID = int(g.Value)
	}
	if sc.GetSupplementalGroupsPolicy() == v1.SupplementalGroupsPolicy_Strict {
		a.Groups = nil
	}
	groups := append([]int{a.GID}, a.Groups...)
	for _, g := range sc.GetSupplementalGroups() {
		groups = append(groups, int(g))
	}
	slices.Sort(groups)
	a.Groups = slices.Compact(groups)
	return a, nil
}

// lookUp finds user[:group] in the image's /etc/passwd and /etc/group, with the groups that name the user. A number needs
// no entry.
func lookUp(root, spec string) (account, error) {
	a := account{Home: "/"}
	user, group, hasGroup := strings.Cut(spec, ":")
	if user == "" {
		user = "0"
	}
	entry, err := findRow(root, "passwd", 6, func(f []string) bool { return f[0] == user || f[2] == user })
	if err != nil {
		return a, err
	}
	name := ""
	if entry != nil {
		name, a.Home = entry[0], entry[5]
		if a.UID, a.GID, err = twoNumbers(entry[2], entry[3]); err != nil {
			return a, fmt.Errorf("user %q in the image's /etc/passwd: %w", user, err)
		}
	} else if a.UID, err = strconv.Atoi(user); err != nil {
		return a, fmt.Errorf("no user %q in the image", user)
	}
	if hasGroup {
		entry, err := findRow(root, "group", 3, func(f []string) bool { return f[0] == group })
		if err != nil {
			return a, err
		}
		if entry != nil {
			group = entry[2]
		}
		if a.GID, err = strconv.Atoi(group); err != nil {
			return a, fmt.Errorf("no group %q in the image", group)
		}
	}
	if name == "" {
		return a, nil
	}
	_, err = findRow(root, "group", 4, func(f []string) bool {
		if g, err := strconv.Atoi(f[2]); err == nil && slices.Contains(strings.Split(f[3], ","), name) {
			a.Groups = append(a.Groups, g)
		}
		return false // all rows
	})
	return a, err
}

func twoNumbers(a, b string) (int, int, error) {
	x, err := strconv.Atoi(a)
	if err != nil {
		return 0, 0, err
	}
	y, err := strconv.Atoi(b)
	return x, y, err
}

// findRow returns the first row of /etc/FILE of the image that has that many fields and is wanted, or nil.
func findRow(root, file string, fields int, wanted func([]string) bool) ([]string, error) {
	f, err := os.Open(filepath.Join(root, "etc", file))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	rows := bufio.NewScanner(f)
	for rows.Scan() {
		if row := strings.Split(rows.Text(), ":"); len(row) >= fields && wanted(row) {
			return row, nil
		}
	}
	return nil, rows.Err()
}
